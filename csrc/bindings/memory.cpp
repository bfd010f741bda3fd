// csrc/memory in Python. Whatever can block or takes long runs without the GIL.
#include <ATen/dlpack.h>  // a plain C header; nothing else of torch is included here
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "memory/available_memory.h"
#include "memory/cuda_memory.h"
#include "memory/fd_channel.h"
#include "memory/gpu_fabric.h"
#include "memory/handle_exchange.h"
#include "memory/host_memory.h"
#include "memory/segmented_memory.h"

namespace py = pybind11;

namespace moe_ep::bindings {
namespace {

using memory::FdChannel;
using memory::HandleForm;
using memory::MemoryKind;
using memory::SegmentedMemory;
using memory::ShareableHandle;
using WithoutGil = py::call_guard<py::gil_scoped_release>;

constexpr const char* kCapsuleName = "dltensor_versioned";  // given by the DLPack standard

// A tensor over the whole range. Holds the memory: a live tensor keeps it mapped, whoever else lets
// go.
struct RangeTensor {
  std::shared_ptr<SegmentedMemory> owner;
  int64_t shape[2];
  int64_t strides[2];
  DLManagedTensorVersioned managed{};

  explicit RangeTensor(std::shared_ptr<SegmentedMemory> memory)
      : owner(std::move(memory)),
        shape{owner->ep_size(), static_cast<int64_t>(owner->geometry().segment_bytes)},
        strides{static_cast<int64_t>(owner->geometry().rank_stride), 1} {
    managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    managed.manager_ctx = this;
    managed.deleter = [](DLManagedTensorVersioned* self) {
      delete static_cast<RangeTensor*>(self->manager_ctx);
    };
    DLTensor& tensor = managed.dl_tensor;
    tensor.data = owner->base();
    const auto cuda_ordinal = owner->kind().cuda_ordinal();
    tensor.device = {cuda_ordinal ? kDLCUDA : kDLCPU, cuda_ordinal.value_or(0)};
    tensor.ndim = 2;
    tensor.dtype = {kDLUInt, 8, 1};
    tensor.shape = shape;
    tensor.strides = strides;
  }
};

py::capsule range_tensor(const std::shared_ptr<SegmentedMemory>& memory) {
  if (memory->state() != SegmentedMemory::State::kMapped) {
    throw std::runtime_error(std::string("a tensor needs memory that is mapped, got ") +
                             memory::name_of(memory->state()));
  }
  auto tensor = std::make_unique<RangeTensor>(memory);
  // A consumer renames the capsule and calls the deleter itself; one that nobody took is freed
  // here.
  py::capsule capsule(&tensor->managed, kCapsuleName, [](PyObject* object) {
    if (!PyCapsule_IsValid(object, kCapsuleName)) return;
    auto* managed =
        static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(object, kCapsuleName));
    managed->deleter(managed);
  });
  tensor.release();
  return capsule;
}

memory::GroupNonce as_nonce(const py::bytes& nonce) {
  const std::string_view bytes = nonce;
  memory::GroupNonce result;
  if (bytes.size() != result.size()) {
    throw std::invalid_argument("nonce must have 16 bytes, got " + std::to_string(bytes.size()));
  }
  std::ranges::transform(bytes, result.begin(), [](char c) { return static_cast<std::byte>(c); });
  return result;
}

// Ctrl-C ends a wait.
memory::Patience patience_of(double timeout_sec) {
  const auto timeout = std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      std::chrono::duration<double>(std::clamp(timeout_sec, 0.0, 86400.0)));
  return {std::chrono::steady_clock::now() + timeout, [] {
            const py::gil_scoped_acquire gil;
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();
          }};
}

using OwnedHandle = std::unique_ptr<ShareableHandle>;

OwnedHandle owned(std::optional<ShareableHandle> handle) {
  return handle ? std::make_unique<ShareableHandle>(std::move(*handle)) : nullptr;
}

std::unique_ptr<ShareableHandle> fabric_handle(const py::bytes& content, uint64_t bytes) {
  const std::string_view given = content;
  ShareableHandle::FabricBytes fabric;
  if (given.size() != fabric.size()) {
    throw std::invalid_argument("a FABRIC handle must have 64 bytes, got " +
                                std::to_string(given.size()));
  }
  std::ranges::transform(given, fabric.begin(), [](char c) { return static_cast<std::byte>(c); });
  return std::make_unique<ShareableHandle>(fabric, bytes);
}

std::optional<py::bytes> fabric_content(const ShareableHandle& handle) {
  const auto* fabric = handle.fabric();
  if (fabric == nullptr) return std::nullopt;
  return py::bytes(reinterpret_cast<const char*>(fabric->data()), fabric->size());
}

void bind_memory_kinds(py::module_& m) {
  py::class_<MemoryKind, std::unique_ptr<MemoryKind, py::nodelete>>(
      m, "MemoryKind", "Where physical memory comes from.")
      .def_property_readonly("granularity", &MemoryKind::granularity);
  m.def("host_memory", &memory::host_memory, py::return_value_policy::reference,
        "Shared memory of CPUs (memfd).");
  m.def(
      "mapped_bytes",
      [](const MemoryKind& kind, uint64_t segment_bytes) {
        return memory::RangeGeometry::of(1, segment_bytes, kind.granularity()).mapped_bytes;
      },
      py::arg("kind"), py::arg("segment_bytes"),
      "Bytes of memory behind a segment: whole granules of its kind.");
  m.def(
      "available_memory",
      [] {
        const memory::AvailableMemory available = memory::available_memory();
        return std::make_tuple(available.bytes, available.scope);
      },
      WithoutGil(),
      "(bytes, scope): what this process may still take; processes of one scope share the bytes.");

  m.def("cuda_memory", &memory::cuda_memory, py::arg("ordinal"), py::return_value_policy::reference,
        "Memory of a CUDA device. Asks for no device before memory is made.");
}

// None of these waits for what runs on the device.
void bind_cuda_devices(py::module_& m) {
  using memory::CudaDevice;
  py::class_<CudaDevice>(m, "CudaDevice", "What a rank tells its group about its GPU.")
      .def_readonly("name", &CudaDevice::name)
      .def_readonly("uuid", &CudaDevice::uuid)
      .def_readonly("free_bytes", &CudaDevice::free_bytes);
  m.def("cuda_device", &memory::cuda_device, py::arg("ordinal"), WithoutGil());
  m.def("reason_against", &memory::reason_against, py::arg("ordinal"), py::arg("form"),
        WithoutGil(), "Why the device's memory cannot be shared in this form; empty if it can.");
  m.def("can_access_peer", &memory::can_access_peer, py::arg("ordinal"), py::arg("peer_uuid"),
        WithoutGil(), "None where this process does not see the peer.");
  m.def(
      "gpu_fabric",
      [](const std::string& gpu_uuid) -> std::optional<std::tuple<py::bytes, uint32_t>> {
        std::optional<memory::GpuFabric> fabric;
        {
          const py::gil_scoped_release without_gil;
          fabric = memory::gpu_fabric(gpu_uuid);
        }
        if (!fabric) return std::nullopt;
        return std::make_tuple(py::bytes(fabric->cluster), fabric->clique);
      },
      py::arg("gpu_uuid"), "(cluster, clique) of the GPU's NVLink domain, None if it is in none.");
}

void bind_segmented_memory(py::module_& m) {
  py::enum_<HandleForm>(m, "HandleForm", "How memory travels to the peers.")
      .value("FILE_DESCRIPTOR", HandleForm::kFileDescriptor)
      .value("FABRIC", HandleForm::kFabric);

  py::class_<ShareableHandle>(m, "ShareableHandle",
                              "Lets another process map the same memory. Closes itself.")
      .def(py::init(&fabric_handle), py::arg("fabric"), py::arg("bytes"))
      .def_property_readonly("descriptor", &ShareableHandle::descriptor,
                             "The file descriptor; -1 once the handle is used up, or FABRIC.")
      .def_property_readonly("fabric", &fabric_content, "64 bytes; None for a file descriptor.")
      .def_property_readonly("bytes", &ShareableHandle::bytes);

  py::class_<SegmentedMemory, std::shared_ptr<SegmentedMemory>>(
      m, "SegmentedMemory", "One range of addresses in which every rank has a segment.")
      .def(py::init<MemoryKind&, int, int, uint64_t>(), py::arg("kind"), py::arg("ep_rank"),
           py::arg("ep_size"), py::arg("segment_bytes"), WithoutGil())
      .def("back_own_segment", &SegmentedMemory::back_own_segment,
           py::arg("form") = HandleForm::kFileDescriptor, WithoutGil(),
           "New zero-filled memory at the own segment.")
      .def("share_own_segment", &SegmentedMemory::share_own_segment, WithoutGil())
      .def(
          "map_peer_segment",
          [](SegmentedMemory& self, int rank, ShareableHandle& handle) {
            self.map_peer_segment(rank, std::move(handle));
          },
          py::arg("rank"), py::arg("handle"), WithoutGil(), "Uses the handle up.")
      .def("release", &SegmentedMemory::release, WithoutGil(),
           "Drops the memory, keeps the addresses: touching them faults.")
      .def("break_off", &SegmentedMemory::break_off, WithoutGil(), "release() for good.")
      .def("to_dlpack", &range_tensor,
           "DLPack capsule: uint8 [ep_size, segment_bytes], strides (rank_stride, 1).")
      .def_property_readonly("state",
                             [](const SegmentedMemory& m) { return memory::name_of(m.state()); })
      .def_property_readonly("ep_rank", &SegmentedMemory::ep_rank)
      .def_property_readonly("ep_size", &SegmentedMemory::ep_size)
      .def_property_readonly(
          "address", [](const SegmentedMemory& m) { return reinterpret_cast<uintptr_t>(m.base()); })
      .def_property_readonly("segment_bytes",
                             [](const SegmentedMemory& m) { return m.geometry().segment_bytes; })
      .def_property_readonly("mapped_bytes",
                             [](const SegmentedMemory& m) { return m.geometry().mapped_bytes; })
      .def_property_readonly("rank_stride",
                             [](const SegmentedMemory& m) { return m.geometry().rank_stride; })
      .def_property_readonly("range_bytes",
                             [](const SegmentedMemory& m) { return m.geometry().range_bytes; });
}

void bind_fd_channel(py::module_& m) {
  py::class_<FdChannel>(m, "FdChannel", "Hands memory handles between processes of one host.")
      .def(py::init(
               [](int rank, const py::bytes& nonce) { return FdChannel(rank, as_nonce(nonce)); }),
           py::arg("rank"), py::arg("nonce"))
      .def_property_readonly("name", &FdChannel::name, "Of the abstract socket, for the peers.")
      .def_property_readonly("refused", &FdChannel::refused)
      .def(
          "send",
          [](const FdChannel& self, const std::string& peer_name, uint32_t round,
             const ShareableHandle* handle,
             double timeout_sec) { self.send(peer_name, round, handle, patience_of(timeout_sec)); },
          py::arg("peer_name"), py::arg("round"), py::arg("handle").none(true),
          py::arg("timeout_sec"), WithoutGil())
      .def(
          "receive",
          [](FdChannel& self, double timeout_sec) {
            memory::HandleMessage message = self.receive(patience_of(timeout_sec));
            return std::make_tuple(message.rank, message.round, owned(std::move(message.handle)));
          },
          py::arg("timeout_sec"), WithoutGil(),
          "(rank, round, handle or None) of the next message.")
      .def(
          "exchange",
          [](FdChannel& self, int ep_rank, const std::vector<std::string>& names, uint32_t round,
             const ShareableHandle& own, double timeout_sec) {
            auto handles = memory::exchange_handles(self, ep_rank, names, round, own,
                                                    patience_of(timeout_sec));
            std::vector<OwnedHandle> result;
            for (auto& handle : handles) result.push_back(owned(std::move(handle)));
            return result;
          },
          py::arg("ep_rank"), py::arg("names"), py::arg("round"), py::arg("own"),
          py::arg("timeout_sec"), WithoutGil(),
          "Collective: the peers' handles by rank, None at the own place.");
}

}  // namespace

void bind_memory(py::module_& m) {
  bind_memory_kinds(m);
  bind_segmented_memory(m);  // with HandleForm, which the next takes
  bind_cuda_devices(m);
  bind_fd_channel(m);
}

}  // namespace moe_ep::bindings
