"""The dialect of llama.cpp's server: `/completion` and `/infill`."""
