"""Job keys: workload, target, LNC, toolchain, options. Given JSON; never imports torch."""
