// How an op fails as Python code does, without knowing of Python.
#pragma once

namespace moe_ep {

// Throws what becomes the Python error that the message stands for; returns if it stands for none.
using ErrorRaiser = void (*)(const char* message);

}  // namespace moe_ep
