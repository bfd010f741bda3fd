#include "ops/device_workspaces.h"

#include <algorithm>
#include <cstring>

#include "ops/device_status.h"
#include "ops/errors.h"
#include "ops/workspace_args.h"

namespace moe_ep::ops {

void DeviceWorkspaceState::runs_on(const CudaCall& call) {
  // A captured round runs where the graph is launched.
  if (call.is_captured() || stream.value_or(call.stream()) != call.stream()) {
    ran_on_one_stream = false;
  }
  stream = call.stream();
}

cudaError_t DeviceWorkspaceState::wait(const CudaCall& call) const {
  if (!stream.has_value()) return cudaSuccess;
  return ran_on_one_stream && *stream == call.stream() ? cudaStreamSynchronize(*stream)
                                                       : cudaDeviceSynchronize();
}

DeviceWorkspaces& DeviceWorkspaces::of_this_process() {
  // Never destroyed: when the process ends, the driver may be gone before this is.
  static auto* const workspaces = new DeviceWorkspaces;
  return *workspaces;
}

void DeviceWorkspaces::add(const RankWorkspace& workspace, const CudaCall& call) {
  const uint64_t fingerprint = workspace.fingerprint;
  if (DeviceWorkspaceState* old = lookup(workspace.own_segment)) {
    check_cuda(old->wait(call), "waiting for the device");
    old->fingerprint = fingerprint;
    old->device = call.device();
    old->timeout_was_raised = false;
    // What it knows of streams stays: a graph that was captured before may run at any time.
    *old->page = StatusPage{};
    return;
  }
  const std::lock_guard lock(mutex_);
  of_segment_[workspace.own_segment] = std::make_unique<DeviceWorkspaceState>(
      DeviceWorkspaceState{fingerprint, call.device(), clean_page()});
}

DeviceWorkspaceState& DeviceWorkspaces::find(const RankWorkspace& workspace, const CudaCall& call) {
  const uint64_t fingerprint = workspace.fingerprint;
  DeviceWorkspaceState* state = lookup(workspace.own_segment);
  if (state != nullptr && state->fingerprint == fingerprint && state->device == call.device()) {
    return *state;
  }
  if (workspace.ep_size > 1) {
    if (state != nullptr) raise_other_geometry();
    if (knows(fingerprint)) raise_copy();
    raise_not_initialised();
  }
  check_state(!call.is_captured(),
              "this workspace tensor is a copy, or was not initialised, and a CUDA graph is being "
              "captured: initialise the workspace and run one eager round on it first");
  ControlBlock control;
  check_cuda(cudaMemcpyAsync(&control, workspace.own_segment, sizeof control,
                             cudaMemcpyDeviceToHost, call.stream()),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(call.stream()), "cudaStreamSynchronize");
  check_initialised(control, fingerprint);
  return state_of_copies(call.device());
}

void DeviceWorkspaces::leave(uint8_t* own_segment, const CudaCall& call) {
  const DeviceWorkspaceState* state = lookup(own_segment);
  if (state == nullptr || call.is_captured()) return;
  // An error here is one of the device, and whatever uses it next hears of it.
  uint32_t& has_left = reinterpret_cast<ControlBlock*>(own_segment)->has_left;
  const bool written =
      state->wait(call) == cudaSuccess &&
      cudaMemsetAsync(&has_left, 1, sizeof has_left, call.stream()) == cudaSuccess &&
      cudaStreamSynchronize(call.stream()) == cudaSuccess;
  if (!written) cudaGetLastError();
}

void DeviceWorkspaces::forget(const RankWorkspace& workspace, const CudaCall& call) {
  const Entry entry = take(workspace);
  if (entry == nullptr) return;
  // An error here is one of the device, and whatever uses it next hears of it. A kernel may then
  // still write to the page: it is not used again.
  if (entry->wait(call) != cudaSuccess) {
    cudaGetLastError();
    return;
  }
  const std::lock_guard lock(mutex_);
  free_pages_.push_back(entry->page);
}

DeviceWorkspaces::Entry DeviceWorkspaces::take(const RankWorkspace& workspace) {
  const std::lock_guard lock(mutex_);
  auto node = of_segment_.extract(workspace.own_segment);
  return node.empty() ? nullptr : std::move(node.mapped());
}

DeviceWorkspaceState* DeviceWorkspaces::lookup(const uint8_t* own_segment) {
  const std::lock_guard lock(mutex_);
  const auto found = of_segment_.find(own_segment);
  return found == of_segment_.end() ? nullptr : found->second.get();
}

bool DeviceWorkspaces::knows(uint64_t fingerprint) {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(
      of_segment_, [&](const auto& entry) { return entry.second->fingerprint == fingerprint; });
}

DeviceWorkspaceState& DeviceWorkspaces::state_of_copies(int32_t device) {
  const std::lock_guard lock(mutex_);
  Entry& entry = of_copies_[device];
  if (entry == nullptr) {
    entry = std::make_unique<DeviceWorkspaceState>(DeviceWorkspaceState{0, device, clean_page()});
  }
  return *entry;
}

StatusPage* DeviceWorkspaces::clean_page() {
  void* memory = nullptr;
  if (free_pages_.empty()) {
    check_cuda(cudaHostAlloc(&memory, sizeof(StatusPage), cudaHostAllocPortable), "cudaHostAlloc");
  } else {
    memory = free_pages_.back();
    free_pages_.pop_back();
  }
  std::memset(memory, 0, sizeof(StatusPage));
  return static_cast<StatusPage*>(memory);
}

DeviceWorkspaceState& begin_call(const RankWorkspace& workspace, const CudaCall& call) {
  DeviceWorkspaceState& state = DeviceWorkspaces::of_this_process().find(workspace, call);
  if (call.is_captured()) {
    check_state(state.round_has_run,
                "the first round of a communication cannot be captured in a CUDA graph: run one "
                "eager round of the same shapes first");
  } else {
    raise_recorded_timeout(state, workspace);
  }
  return state;
}

}  // namespace moe_ep::ops
