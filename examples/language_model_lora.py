"""The Fisher information of a LoRA adapter on a causal language model, per sequence and per token.

python examples/language_model_lora.py
python examples/language_model_lora.py --model meta-llama/Llama-3.2-1B --data texts.csv
"""

import argparse

import peft
import small

import neuromanifold as nm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a name on the Hugging Face hub, or a folder of save_pretrained")
parser.add_argument("--data", help="a file with a column of texts")
arguments = parser.parse_args()

loaded = nm.load_model(arguments.model or small.language_model(), task="causal")
data = nm.load_data(arguments.data or small.reviews(), loaded, batch_size=8)
settings = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
model = peft.get_peft_model(loaded.module, settings)
for name, parameter in model.named_parameters():  # stands for training: a fresh adapter has B = 0, and F(A) = 0
    if "lora_B" in name:
        parameter.data.normal_(std=0.02)

fim = nm.fisher_diagonal(model, data)  # of what is trainable: the adapter
print(fim)
print(f"tr F = {fim.trace.value:.3g} {fim.unit}, {fim.per_token.trace.value:.3g} per token")
layers = sorted(fim, key=lambda name: float(fim[name].sum()), reverse=True)
print("most important:", *layers[:3], sep="\n  ")
