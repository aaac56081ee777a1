"""The time estimate against published times of real GPUs; `retro-bench estimate --calibration`."""
