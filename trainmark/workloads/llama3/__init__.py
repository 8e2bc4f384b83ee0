"""Llama-3: a language model, trained from tokenised text over pipeline x data x tensor ranks.

Besides the files that every workload has (docs/adding_a_workload.md):

    pipeline.py       the stages under PyTorch's pipeline schedules; stages.py: their layers
    memory.py         bytes on each device, counted without torch
    step_time.py      how long a step should take; plan.py: what `trainmark plan` tells of it
    huggingface.py    config.json and weights of Hugging Face's folders, in and out
    chain.py          the made-up language of `--data synthetic`
"""
