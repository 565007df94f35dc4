"""A chat answer, printed as it comes."""

from ostinato import LLM, SamplingParams

with LLM("smollm2", max_num_seqs=1, max_model_len=2048, max_num_batched_tokens=256) as llm:
    prompt = llm.chat_prompt([{"role": "user", "content": "What is the capital of France? Answer in one sentence."}])
    for delta in llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=40)):
        print(delta.text, end="", flush=True)
    print()
