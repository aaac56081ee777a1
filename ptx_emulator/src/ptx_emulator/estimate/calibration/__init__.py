"""The time estimate against published times of real GPUs; `ptx-emulator estimate --calibration`."""
