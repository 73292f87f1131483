"""Runs the CUDA sources of this package on the CPU with g++: every thread a fiber, every barrier a turn of a scheduler."""
