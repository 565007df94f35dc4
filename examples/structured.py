"""Answers that are always of the asked form: one of some words, a number, an object with given fields."""

from ostinato import LLM, SamplingParams, StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

with LLM("smollm2", max_num_seqs=4, max_model_len=512) as llm:
    for question, structure in (
        ("Is Paris in France? Answer yes or no.", StructuredOutputsParams(choice=["yes", "no"])),
        ("How many legs does a spider have?", StructuredOutputsParams(regex="[0-9]{1,3}")),
        ("Invent a person. Give a name and an age.", StructuredOutputsParams(json=PERSON)),
    ):
        params = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=structure)
        [output] = llm.chat([{"role": "user", "content": question}], params)
        print(question, "->", output.outputs[0].text)
