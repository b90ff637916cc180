"""Small stand-ins for models and data, made on the spot, so that every example runs without a network.

Each example takes --model and --data; without them it takes what is made here.
"""

import tempfile
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = "[PAD] [UNK] a good bad film story and very dull bright with long short cast".split()


def folder() -> Path:
    """A folder for what an example writes."""
    return Path(tempfile.mkdtemp(prefix="neuromanifold-example-"))


def tokenizer(where: Path) -> None:
    """A tokenizer of a few words."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[PAD]", "model_max_length": 32}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(where)


def text_classifier(seed: int = 0) -> str:
    """A DistilBERT of two layers, as `save_pretrained` writes it."""
    where = folder()
    tokenizer(where)
    torch.manual_seed(seed)
    size = {"vocab_size": len(WORDS), "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}
    transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(**size)).save_pretrained(where)
    return str(where)


def language_model() -> str:
    """A Llama of two layers."""
    where = folder()
    tokenizer(where)
    torch.manual_seed(0)
    size = {"vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, **size)
    transformers.LlamaForCausalLM(config).save_pretrained(where)
    return str(where)


def reviews() -> str:
    """A table of 64 short texts with labels."""
    path = folder() / "reviews.csv"
    adjectives = ("good", "bad", "very good", "very bad", "dull", "bright", "long", "short")
    rows = [f"a {x} film and a {y} story,{x.endswith('good'):d}" for x in adjectives for y in adjectives]
    path.write_text("\n".join(["text,label", *rows]))
    return str(path)


def images(samples: int = 512) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of scikit-learn's digits, [64, 1, 8, 8], with labels."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = torch.tensor(pixels[:samples]).float() / 16, torch.tensor(labels[:samples])
    return list(zip(pixels.view(-1, 1, 8, 8).split(64), labels.split(64), strict=True))


def network(seed: int = 0, epochs: int = 15, data: list[tuple[torch.Tensor, torch.Tensor]] | None = None):
    """A small convolutional network that has been trained on digits."""
    torch.manual_seed(seed)
    layers = [torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(128, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    return fit(model, data if data is not None else images(), epochs)


def fit(model, data, epochs: int, penalty=lambda model: 0.0):
    """Train with Adam; `penalty(model)` is added to the loss."""
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for inputs, labels in data:
            optimizer.zero_grad()
            (torch.nn.functional.cross_entropy(model(inputs), labels) + penalty(model)).backward()
            optimizer.step()
    return model


def accuracy(model, data) -> float:
    """Share of right predictions, in %."""
    with torch.no_grad():
        right = [(model(inputs).argmax(-1) == labels).float() for inputs, labels in data]
    return 100 * float(torch.cat(right).mean())
