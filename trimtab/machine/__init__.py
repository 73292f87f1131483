"""What this machine is and what is remembered of it: memory, GPUs, rates, installed packages, files kept between runs. No torch."""
