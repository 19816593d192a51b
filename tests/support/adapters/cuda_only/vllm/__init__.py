"""Stands in for vLLM, which OpenRLHF imports with its trainer; the service's engines take its place."""

__version__ = "0.29.0"


class SamplingParams:
    """Sampling parameters, as OpenRLHF makes them."""

    def __init__(self, **given: object) -> None:
        self.__dict__.update(given)
