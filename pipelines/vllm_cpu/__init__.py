"""The real cluster on CPUs: vLLM engines and NIXL hand-offs, paced to a GPU's step times."""
