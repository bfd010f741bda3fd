#include "memory/shareable_handle.h"

namespace moe_ep::memory {

const char* name_of(HandleForm form) {
  return form == HandleForm::kFabric ? "FABRIC handle" : "file descriptor";
}

}  // namespace moe_ep::memory
