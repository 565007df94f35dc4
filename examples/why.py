"""Why each step ran as it did: the counts by mode, key and reason, for a ladder that fits badly and one that fits."""

from ostinato import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = ["One", "Two is", "Three is more", "Four is more than", "Five is more than four"]

for sizes in ([1, 2, 8], [1, 2, 4, 5, 8]):
    with LLM(
        "smollm2", max_num_seqs=8, max_model_len=256, max_num_batched_tokens=64, cudagraph_capture_sizes=sizes
    ) as llm:
        llm.generate(PROMPTS, PARAMS)
        print(f"cudagraph_capture_sizes={sizes}")
        for step in llm.stats().steps:
            live = f"{step.live_tokens} of {step.padded_tokens} tokens"
            print(f"  {step.count:3} steps, {step.mode}: {step.reason} ({live} are live)")
