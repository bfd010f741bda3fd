// Cake is the one-sided transport with bulk copies: what that has is at hand in its namespace.
#pragma once

namespace moe_ep {

namespace one_sided {}

namespace cake {
using namespace one_sided;
}

}  // namespace moe_ep
