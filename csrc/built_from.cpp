// States the sources and the compiler of the library that contains this object. retro_kernels/built_from.py reads the
// text from the file.
extern "C" {
extern __attribute__((visibility("default"))) const char retro_built_from[];
const char retro_built_from[] = "retro-built-from:" RETRO_BUILT_FROM;
}
