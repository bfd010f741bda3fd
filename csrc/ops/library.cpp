// The schemas of every op. Implementations stand beside this file, by transport and device.
//
// An op that touches a workspace declares that it mutates it, the readers too: that keeps the ops
// of a graph in their order. Outputs are fresh tensors, never views of the workspace, so that
// functionalisation has no reason to clone it. Views are made where that is done with, in the code
// that Inductor writes: see moe_ep/inductor_views.py.
#include <torch/csrc/stable/library.h>

#include "ops/one_sided_backends.h"

namespace {

// enable_pdl: whether a kernel may start while the one before it still runs; nothing on the CPU.
// low_precision: whether expert rows travel as scaled FP8; the same on all ranks.
template <typename Library>
void define_one_sided(Library& m, const char* backend) {
  const auto def = [&](const char* schema) { m.def(moe_ep::ops::op_of(backend, schema).c_str()); };
  def("initialize(Tensor(a!) workspace, int[] geometry, int ep_rank) -> ()");
  def("dispatch(Tensor(a!) workspace, Tensor topk_ids, Tensor? topk_weights, "
      "Tensor[] payloads, Tensor? eplb_local_stats, Tensor? active_rank_mask, int[] geometry, "
      "int ep_rank, int invalid_expert_id, SymInt tokens_per_rank, int timeout_sec, "
      "bool enable_pdl=True) -> (Tensor topk_ids, Tensor topk_weights, Tensor recv_token_counts, "
      "Tensor eplb_gathered_stats)");
  // For eager code and captured graphs, which read the results in the workspace itself.
  def("dispatch_in_place(Tensor(a!) workspace, Tensor topk_ids, Tensor? topk_weights, "
      "Tensor[] payloads, Tensor? eplb_local_stats, Tensor? active_rank_mask, int[] geometry, "
      "int ep_rank, int invalid_expert_id, SymInt tokens_per_rank, int timeout_sec, "
      "bool enable_pdl=True) -> ()");
  def("received_rows(Tensor(a!) workspace, int[] geometry, int ep_rank, "
      "SymInt tokens_per_rank, int[] row_bytes, int index, ScalarType dtype) -> Tensor");
  def("combine(Tensor(a!) workspace, Tensor? expert_output, Tensor? active_rank_mask, "
      "int[] geometry, int ep_rank, SymInt num_tokens, SymInt tokens_per_rank, int hidden_size, "
      "ScalarType dtype, int timeout_sec, bool enable_pdl=True, bool low_precision=False) -> "
      "Tensor");
  def("combine_out(Tensor(a!) workspace, Tensor? expert_output, Tensor? active_rank_mask, "
      "int[] geometry, int ep_rank, SymInt tokens_per_rank, int timeout_sec, Tensor(b!) output, "
      "bool enable_pdl=True, bool low_precision=False) -> ()");
  def("combine_quantized(Tensor(a!) workspace, Tensor? expert_output, "
      "Tensor? active_rank_mask, int[] geometry, int ep_rank, SymInt num_tokens, "
      "SymInt tokens_per_rank, int hidden_size, ScalarType dtype, int timeout_sec, int format, "
      "int scale_layout, float scalar_scale, bool enable_pdl=True, bool low_precision=False) "
      "-> (Tensor values, Tensor scales)");
  // On the CPU: in place of combine, by a rank that has no expert outputs.
  def("abandon(Tensor(a!) workspace, int[] geometry, int ep_rank, int timeout_sec) -> ()");
  // On the CPU: a round of ranks that hold the same tokens, see one_sided_shared_batch.cpp.
  def("begin_shared_batch(Tensor(a!) workspace, Tensor topk_ids, int[] geometry, int ep_rank, "
      "int timeout_sec) -> ()");
  def("end_shared_batch(Tensor(a!) workspace, int[] geometry, int ep_rank, SymInt num_tokens, "
      "int hidden_size, ScalarType dtype, int timeout_sec) -> Tensor");
  def("check(Tensor(a!) workspace, int[] geometry, int ep_rank) -> ()");
  // Lets go of what the process keeps about a workspace outside of it; before the workspace ends.
  def("forget(Tensor(a!) workspace, int[] geometry, int ep_rank) -> ()");
}

}  // namespace

STABLE_TORCH_LIBRARY(moe_ep, m) {
  for (const char* backend : moe_ep::ops::kOneSidedBackends) define_one_sided(m, backend);
  // What the last dispatch of a one-sided backend has left in the workspace: the rows of a payload,
  // or the output of `dispatch` with this index. For the code that Inductor writes, not for graphs.
  m.def(
      "received_rows_view(Tensor(a) workspace, int[] geometry, int ep_rank, "
      "SymInt tokens_per_rank, int[] row_bytes, int index, ScalarType dtype) -> Tensor(a)");
  m.def(
      "received_routing_view(Tensor(a) workspace, int[] geometry, int ep_rank, "
      "SymInt tokens_per_rank, int index) -> Tensor(a)");
  // A two-sided round: prepare, alltoallv, combine. recv_counts become 0 where the rows do not
  // come. max_sm_count: multiprocessors that a call uses at a time; 0: no limit. Nothing on the
  // CPU. row_bytes: of the fields that alltoallv will move; has_weights: whether weights are among
  // them.
  m.def(
      "two_sided_prepare(Tensor(a!) workspace, Tensor topk_ids, int[] geometry, int ep_rank, "
      "int invalid_expert_id, SymInt tokens_per_rank, int[] row_bytes, bool has_weights, "
      "int timeout_sec) -> (Tensor topk_ids, Tensor send_tokens, Tensor send_counts, "
      "Tensor recv_counts)");
  m.def(
      "two_sided_alltoallv(Tensor(a!) workspace, Tensor[] rows, Tensor send_tokens, "
      "int[] geometry, int ep_rank, int timeout_sec, Tensor(b!)[] received, "
      "Tensor(c!) recv_counts, int max_sm_count=0) -> ()");
  m.def(
      "two_sided_combine(Tensor(a!) workspace, Tensor expert_output, Tensor send_tokens, "
      "int[] geometry, int ep_rank, SymInt num_tokens, int timeout_sec, int max_sm_count=0) -> "
      "Tensor");
  m.def(
      "two_sided_combine_out(Tensor(a!) workspace, Tensor expert_output, Tensor send_tokens, "
      "int[] geometry, int ep_rank, int timeout_sec, Tensor(b!) output, int max_sm_count=0) -> ()");
  // On the CPU: in place of combine, by a rank that has no expert outputs.
  m.def(
      "two_sided_abandon(Tensor(a!) workspace, int[] geometry, int ep_rank, int timeout_sec) -> "
      "()");
  m.def("two_sided_initialize(Tensor(a!) workspace, int[] geometry, int ep_rank) -> ()");
  m.def("two_sided_check(Tensor(a!) workspace, int[] geometry, int ep_rank) -> ()");
  m.def("two_sided_forget(Tensor(a!) workspace, int[] geometry, int ep_rank) -> ()");
  m.def(
      "sanitize_expert_ids(Tensor(a!) topk_ids, Tensor recv_token_counts, int invalid_expert_id) "
      "-> ()");
  // On the CPU, see expert_picks.cpp.
  m.def(
      "group_picks(Tensor topk_ids, int first_expert, int alignment, Tensor(a!) counts, "
      "Tensor(b!) offsets, Tensor(c!) row_of_pick, Tensor(d!) pick_of_row) -> bool");
  m.def(
      "rows_of_picks(Tensor source, Tensor topk_ids, int first_expert, int num_experts) -> "
      "(Tensor rows, Tensor experts, Tensor row_of_pick)");
  m.def("copy_rows(Tensor source, Tensor index, Tensor(a!) output) -> ()");
  m.def(
      "sum_rows(Tensor rows, Tensor? weights, Tensor row_of_pick, Tensor(a!) output, "
      "bool zero_others=False) -> ()");
  // On the CPU: tells peers that wait for this rank that it comes to no further round.
  m.def("leave(Tensor(a!) workspace, int ep_rank) -> ()");
  m.def("set_interrupt_check(int address) -> ()");
  m.def("set_error_raiser(int address) -> ()");
  m.def("active_rank_mask(int[] ranks, int ep_size) -> Tensor");
  // Where the library has kernels for CUDA: the compute capability that the code was compiled for
  // which a device runs, 90 for 9.0; 0 if there is none for it.
  m.def("code_capability(int device_capability) -> int");
}
