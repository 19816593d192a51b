"""Sums of listed values: work whose parts are known only after the first step."""
