#pragma once

namespace retro::RETRO_ISA {

void check_primitives();  // throws std::runtime_error, which names the function

}  // namespace retro::RETRO_ISA
