// How a wait on the CPU learns that its caller wants it to end (Ctrl-C), without knowing of Python.
#pragma once

namespace moe_ep {

// Returns whether to give up. Called a few times a second by a thread that waits, and by no other.
using InterruptCheck = bool (*)();

}  // namespace moe_ep
