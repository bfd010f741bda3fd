// From the records in a status page to exceptions. Nothing here waits for the device, unless it
// says so.
#pragma once

#include <memory>

#include "core/status.h"
#include "core/status_page.h"
#include "ops/cuda_call.h"
#include "ops/device_workspaces.h"

namespace moe_ep::ops {

// MoEEpTimeoutError or MoEEpMaskDisagreementError the first time, then MoEEpStateError; nothing if
// no wait timed out and no masks differed.
void raise_recorded_timeout(DeviceWorkspaceState& state, const RankWorkspace& workspace);
// One of the first two every time.
void raise_timeout_again(DeviceWorkspaceState& state, const RankWorkspace& workspace);

// What a round recorded after which the communication goes on; taken out of the page.
class RoundErrors {
 public:
  RoundErrors() = default;
  // Waits for what runs on the stream if there is a record, so that it is whole.
  RoundErrors(StatusPage& page, cudaStream_t stream);

  // MoEEpDisagreementError, MoEEpInputError, or nothing.
  void raise(const RankWorkspace& workspace) const;

 private:
  std::unique_ptr<DisagreementRecord> disagreement_;  // null: none
  InvalidIdRecord invalid_id_{};                      // count 0: none
};

}  // namespace moe_ep::ops
