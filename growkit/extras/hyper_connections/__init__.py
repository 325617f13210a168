"""Several residual streams in place of one: Llama with the hyper-connections of DeepSeek-V4."""
