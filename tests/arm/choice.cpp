// Print the instruction sets that csrc/cpu/isa.cpp finds on this processor.
#include <cstdio>

#include "cpu/isa.h"

int main() { std::puts(retro::supported_isas().c_str()); }
