// Layout queries for Python: the offsets and sizes that kernels use, from the same functions.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/expert_partition.h"
#include "core/geometry.h"
#include "core/geometry_check.h"
#include "core/limits.h"
#include "core/payload_placement.h"
#include "core/quant_formats.h"
#include "core/rank_mask.h"
#include "core/scale_layout.h"
#include "core/workspace_layout.h"
#include "one_sided/fp8_rows.h"
#include "one_sided/small_steps.h"
#include "two_sided/geometry.h"
#include "two_sided/layout.h"

namespace py = pybind11;

namespace moe_ep::bindings {
namespace {

// The order in which the ops take the fields of Geometry.
std::vector<int64_t> fields_of(const Geometry& g) {
  return {g.ep_size,
          g.num_experts,
          g.top_k,
          g.max_tokens_per_rank,
          g.dispatch_bytes_per_token,
          g.combine_bytes_per_token,
          g.eplb_stats_num_experts,
          g.low_latency_tokens,
          g.spans_gpus,
          g.prefers_packets,
          g.max_top_k,
          g.has_rank_masks};
}

// Bytes from the start of a segment.
template <Region WorkspaceLayout::* kRegion>
uint64_t offset_of(const Geometry& g) {
  return (WorkspaceLayout::of(g).*kRegion).offset;
}

uint64_t payload_offset(const Geometry& g, int64_t tokens_per_rank,
                        const std::vector<int64_t>& row_bytes, size_t index) {
  if (row_bytes.size() > kMaxPayloads || index >= row_bytes.size()) {
    throw std::invalid_argument("at most " + std::to_string(kMaxPayloads) + " payloads, got " +
                                std::to_string(row_bytes.size()));
  }
  return PayloadPlacement::of(g, tokens_per_rank, row_bytes.data(),
                              static_cast<int32_t>(row_bytes.size()))
      .offset[index];
}

void bind_fifo_geometry(py::module_& m) {
  using two_sided::FifoLayout;
  using Fifos = two_sided::Geometry;
  py::class_<Fifos>(m, "FifoGeometry",
                    "The numbers that size a two-sided workspace; the same on every rank.")
      .def(py::init(&two_sided::valid_geometry), py::kw_only(), py::arg("ep_size"),
           py::arg("num_experts"), py::arg("top_k"), py::arg("max_tokens_per_rank"),
           py::arg("num_slots"), py::arg("slot_bytes"), py::arg("num_channels") = 1,
           py::arg("spans_gpus") = 1)
      .def_readonly("ep_size", &Fifos::ep_size)
      .def_readonly("top_k", &Fifos::top_k)
      .def_readonly("max_tokens_per_rank", &Fifos::max_tokens_per_rank)
      .def_readonly("num_slots", &Fifos::num_slots)
      .def_readonly("slot_bytes", &Fifos::slot_bytes)
      .def_readonly("num_channels", &Fifos::num_channels)
      .def(
          "fields",
          [](const Fifos& g) {
            return std::vector<int64_t>{
                g.ep_size,   g.num_experts, g.top_k,        g.max_tokens_per_rank,
                g.num_slots, g.slot_bytes,  g.num_channels, g.spans_gpus};
          },
          "The int[] that ops take as `geometry`.")
      .def_property_readonly("fingerprint", &Fifos::fingerprint,
                             "Of the layout: layers with the same one can take turns.")
      .def_property_readonly(
          "segment_bytes", [](const Fifos& g) { return FifoLayout::of(g).segment_bytes; },
          "Bytes of one rank's segment.");
}

}  // namespace

void bind_layout(py::module_& m) {
  m.attr("MAX_EP_SIZE") = kMaxEpSize;
  m.attr("MAX_TOP_K") = kMaxTopK;
  m.attr("MAX_PACKET_TOKENS") = kMaxPacketTokens;
  m.attr("MAX_PAYLOADS") = kMaxPayloads;
  m.attr("MAX_TIMEOUT_SEC") = kMaxTimeoutSec;

  py::class_<Geometry> geometry(m, "Geometry",
                                "The numbers that size a workspace; the same on every rank.");
  geometry
      .def(py::init(&valid_geometry), py::kw_only(), py::arg("ep_size"), py::arg("num_experts"),
           py::arg("top_k"), py::arg("max_tokens_per_rank"), py::arg("dispatch_bytes_per_token"),
           py::arg("combine_bytes_per_token"), py::arg("eplb_stats_num_experts") = 0,
           py::arg("low_latency_tokens") = 0, py::arg("spans_gpus") = 1,
           py::arg("prefers_packets") = 0, py::arg("max_top_k") = 0, py::arg("has_rank_masks") = 1)
      .def_readonly("ep_size", &Geometry::ep_size)
      .def_readonly("top_k", &Geometry::top_k)
      .def_readonly("max_tokens_per_rank", &Geometry::max_tokens_per_rank)
      .def_readonly("combine_bytes_per_token", &Geometry::combine_bytes_per_token)
      .def_readonly("eplb_stats_num_experts", &Geometry::eplb_stats_num_experts)
      .def_readonly("low_latency_tokens", &Geometry::low_latency_tokens)
      .def_readonly("prefers_packets", &Geometry::prefers_packets)
      .def("fields", &fields_of, "The int[] that ops take as `geometry`.")
      .def_property_readonly("fingerprint", &Geometry::fingerprint,
                             "Of the layout: layers with the same one can take turns.")
      .def_property_readonly(
          "segment_bytes", [](const Geometry& g) { return WorkspaceLayout::of(g).segment_bytes; },
          "Bytes of one rank's segment.")
      .def_property_readonly("recv_counts_offset", &offset_of<&WorkspaceLayout::recv_counts>)
      .def_property_readonly("eplb_stats_offset", &offset_of<&WorkspaceLayout::eplb_stats>)
      .def_property_readonly("topk_ids_offset", &offset_of<&WorkspaceLayout::topk_ids>)
      .def_property_readonly("topk_weights_offset", &offset_of<&WorkspaceLayout::topk_weights>)
      .def_property_readonly("combine_rows_offset", &offset_of<&WorkspaceLayout::combine_rows>)
      .def("payload_offset", &payload_offset, py::arg("tokens_per_rank"), py::arg("row_bytes"),
           py::arg("index"), "Byte offset in a segment of the received rows of one payload.");

  py::enum_<RowType>(m, "RowType", "Of the elements of expert rows.")
      .value("FLOAT32", RowType::kFloat32)
      .value("FLOAT16", RowType::kFloat16)
      .value("BFLOAT16", RowType::kBFloat16);
  m.attr("QUANTIZED_BY_READER") = one_sided::kQuantizedByReader;
  geometry.def("reader_quantizes", &one_sided::reader_quantizes, py::arg("hidden_size"),
               py::arg("row_type"),
               "Whether rows of a low-precision combine lie in the workspace as they are, and are "
               "quantised by who sums them, where the backend can.");

  bind_fifo_geometry(m);

  m.def(
      "expert_range",
      [](int32_t num_experts, int32_t ep_size, int32_t ep_rank) {
        const ExpertRange range = ExpertPartition(num_experts, ep_size).of_rank(ep_rank);
        return std::pair(range.first, range.count);
      },
      py::arg("num_experts"), py::arg("ep_size"), py::arg("ep_rank"),
      "(first, count) of the experts that a rank owns.");
  m.def(
      "expert_owner",
      [](int32_t num_experts, int32_t ep_size, int32_t expert) {
        return ExpertPartition(num_experts, ep_size).owner_of(expert);
      },
      py::arg("num_experts"), py::arg("ep_size"), py::arg("expert"),
      "The rank that owns an expert.");

  py::enum_<QuantFormat>(m, "QuantFormat", "The formats that combine can quantise to.")
      .value("MXFP8", QuantFormat::kMxfp8)
      .value("MXFP4", QuantFormat::kMxfp4)
      .value("NVFP4", QuantFormat::kNvfp4);
  py::enum_<ScaleLayout>(m, "ScaleLayout", "Where the scale of (row, block) lies.")
      .value("LINEAR", ScaleLayout::kLinear)
      .value("SWIZZLE_128x4", ScaleLayout::kSwizzle128x4)
      .value("SWIZZLE_8x4", ScaleLayout::kSwizzle8x4);
  m.def("low_latency_tokens", &one_sided::low_latency_tokens, py::arg("ep_size"), py::arg("top_k"),
        py::arg("max_tokens_per_rank"), "Up to so many tokens a rank travel as packets on CUDA.");
  m.def("row_pitch", &row_pitch, py::arg("row_bytes"),
        "Bytes from one row of the workspace to the next.");
  m.def("rank_mask_words", &rank_mask_words, py::arg("ep_size"), "64-bit words of a rank mask.");
  m.def("quantized_row_bytes", &quantized_row_bytes, py::arg("format"), py::arg("hidden_size"));
  m.def("scales_per_row", &scales_per_row, py::arg("format"), py::arg("hidden_size"));
  m.def("rows_per_scale_tile", &rows_per_scale_tile, py::arg("layout"));
  m.def("padded_scale_blocks", &padded_scale_blocks, py::arg("layout"), py::arg("num_blocks"));
}

}  // namespace moe_ep::bindings
