"""Three prompts in one batch, each with its own sampling parameters."""

from ostinato import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The three primary colours are", "def fibonacci(n):"]

with LLM("smollm2", max_num_seqs=8, max_model_len=2048, max_num_batched_tokens=512) as llm:
    params = [SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_tokens=40) for seed in range(len(PROMPTS))]
    for output in llm.generate(PROMPTS, params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")
