// Prints the instruction sets that csrc/cpu/isa.cpp finds on the processor that runs this.
#include <cstdio>

#include "cpu/isa.h"

int main() { std::puts(retro::supported_isas().c_str()); }
