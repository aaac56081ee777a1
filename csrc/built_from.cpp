// Text that states from which sources and by which compiler this library was built. retro_kernels/built_from.py reads
// the text from the library's file.
extern "C" {
extern __attribute__((visibility("default"))) const char retro_built_from[];
const char retro_built_from[] = "retro-built-from:" RETRO_BUILT_FROM;
}
