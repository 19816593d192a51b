"""Stands in for flash-attn, which cannot be installed without CUDA, so that trainers that import it can be imported."""
