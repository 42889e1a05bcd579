"""neffcache: a compile cache and ahead-of-time build tool for PyTorch training on AWS Trainium."""

__version__ = "0.1.0"
