// What the process keeps in host memory about workspaces on CUDA devices. The host cannot look into
// them without waiting for the device, so it knows them by the address of the own segment.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/status_page.h"
#include "one_sided/params.h"
#include "ops/cuda_call.h"

namespace moe_ep::ops {

// A rank's workspace, of any transport.
struct RankWorkspace {
  const uint8_t* own_segment;  // begins with its ControlBlock
  int32_t ep_rank;
  int32_t ep_size;
  uint64_t fingerprint;  // of its geometry

  // View: a transport's WorkspaceView.
  template <typename View>
  RankWorkspace(const View& view)  // NOLINT: a view is one
      : own_segment(view.segment(view.ep_rank)),
        ep_rank(view.ep_rank),
        ep_size(view.geometry.ep_size),
        fingerprint(view.geometry.fingerprint()) {}
};

// What the process keeps about one. Used by one call at a time, as all ops on a workspace are.
struct DeviceWorkspaceState {
  uint64_t fingerprint;  // of the geometry it was initialised for
  int32_t device;
  StatusPage* page;  // pinned: kernels write it
  bool round_has_run = false;
  bool timeout_was_raised = false;
  // Where its rounds run, so that `wait` waits for no more than it must.
  std::optional<cudaStream_t> stream = std::nullopt;  // of the last one; none: no round yet
  bool ran_on_one_stream = true;

  void runs_on(const CudaCall& call);
  // For all rounds so far.
  cudaError_t wait(const CudaCall& call) const;
};

class DeviceWorkspaces {
 public:
  static DeviceWorkspaces& of_this_process();

  // For `initialize`: a new state, or a clean one on the page of old, which CUDA graphs may know.
  // Waits for the rounds of old.
  void add(const RankWorkspace& workspace, const CudaCall& call);

  // Raises MoEEpStateError unless the workspace was initialised for this geometry; if it has peers,
  // it must be the very memory. One without may be a copy (tests of the ops make copies), which is
  // asked itself: that waits for the device.
  DeviceWorkspaceState& find(const RankWorkspace& workspace, const CudaCall& call);

  // Tells peers that wait for this rank, or will, that it comes to no further round, once its
  // rounds are over. own_segment: of a workspace; one that is not there is fine.
  void leave(uint8_t* own_segment, const CudaCall& call);

  // Forgets a workspace, once its rounds are over; one that is not there is fine.
  void forget(const RankWorkspace& workspace, const CudaCall& call);

 private:
  using Entry = std::unique_ptr<DeviceWorkspaceState>;  // states stay where they are

  Entry take(const RankWorkspace& workspace);
  DeviceWorkspaceState* lookup(const uint8_t* own_segment);
  bool knows(uint64_t fingerprint);
  DeviceWorkspaceState& state_of_copies(int32_t device);
  StatusPage* clean_page();

  std::mutex mutex_;
  std::unordered_map<const uint8_t*, Entry> of_segment_;
  // Copies of one-rank workspaces share what the process keeps about them, by device.
  std::unordered_map<int32_t, Entry> of_copies_;
  std::vector<StatusPage*> free_pages_;  // freeing pinned memory would wait for the device
};

// The state of a workspace at the start of an op on it. Raises what a round before it has recorded
// so far and nothing can be done about: a wait that timed out.
DeviceWorkspaceState& begin_call(const RankWorkspace& workspace, const CudaCall& call);

}  // namespace moe_ep::ops
