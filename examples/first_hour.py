"""Thirty frequent tasks, each in a few lines.

    python examples/first_hour.py [FOLDER]

Everything runs offline on a small model that the program trains first; use any folder or Hub name instead. Heads that
the small model lacks are trained for a few steps, so their results are not good. Files are written to FOLDER, or to a
temporary folder.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flodl.errors import FlodlError
from flodl_hf import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    finetune,
    load,
    pipeline,
    predict_file,
)
from flodl_hf.training.demo import LABELS, sentences, write_demo

TEXTS = ["The breakfast was delicious.", "Our room was dirty.", "I love the music."]
TASKS: list[Callable[[Path], Any]] = []


def task(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Register a task; its docstring describes it, and it returns its result."""
    TASKS.append(function)
    return function


# --- predictions -----------------------------------------------------------------------------------------


@task
def classify_a_text(demo: Path) -> Any:
    """Load a model and classify one text."""
    model: Any = load(demo)
    found = model.predict("I love it.")
    assert found.label == "praise"
    return found


@task
def classify_many_texts(demo: Path) -> Any:
    """A list of texts returns a list of results in the same order."""
    found = load(demo).predict(TEXTS)
    assert [one.label for one in found] == ["praise", "complaint", "praise"]
    return found


@task
def keep_the_sure_ones(demo: Path) -> Any:
    """Labels above a threshold, with a maximum number."""
    model: Any = load(demo)
    assert all(len(one) <= 1 for one in model.predict(TEXTS, top_k=1, threshold=0.9))
    return model.predict(TEXTS, threshold={"praise": 0.99})


@task
def classify_pairs(demo: Path) -> Any:
    """A pair of texts is a tuple in a list."""
    return load(demo).predict([("Was it good?", "I love it.")])


@task
def read_a_long_text(demo: Path) -> Any:
    """A text that exceeds the length of the model is read in windows."""
    found = load(demo).predict("The breakfast was delicious. " * 100)
    assert found.windows > 1
    return found


@task
def answer_a_stream(demo: Path) -> Any:
    """An iterator returns an iterator: any number of texts in constant memory."""
    return next(load(demo).predict(text for text in TEXTS))


@task
def meet_an_empty_text(demo: Path) -> Any:
    """The result of an empty text has the flag ``empty``."""
    found = load(demo).predict(["I love it.", "  "])
    assert found.empty == [1]
    return found


@task
def results_as_json(demo: Path) -> Any:
    """Convert results to dictionaries, JSON or rows of a table."""
    found = load(demo).predict(TEXTS)
    json.dumps(found.to_dict())
    return found.to_rows()[0]


@task
def a_pipeline_as_before(demo: Path) -> Any:
    """Use the pipelines of transformers without changes."""
    classify = pipeline("sentiment-analysis", model=str(demo))
    (found,) = classify("I love it.")
    assert found["label"] == "praise"
    return classify(TEXTS, top_k=1)


@task
def a_file_of_texts(demo: Path) -> Any:
    """Label a file; the same call resumes an interrupted job."""
    source, out = demo.parent / "texts.csv", demo.parent / "answers.csv"
    source.write_text("id,text\n" + "".join(f"{n},{text}\n" for n, text in enumerate(TEXTS)), encoding="utf-8")
    result = predict_file(demo, source, out, overwrite=True)
    assert result.written == len(TEXTS)
    return out.read_text(encoding="utf-8").splitlines()[1]


# --- vectors -----------------------------------------------------------------------------------------


@task
def embed_texts(demo: Path) -> Any:
    """Compute one vector per text."""
    vectors = AutoModel.from_pretrained(demo).embed(TEXTS)
    assert isinstance(vectors, torch.Tensor)
    return tuple(vectors.shape)


@task
def vectors_as_sentence_transformers(demo: Path) -> Any:
    """Compute arrays with the arguments of sentence-transformers."""
    return AutoModel.from_pretrained(demo).encode(TEXTS, normalize_embeddings=True).shape


@task
def find_the_closest_text(demo: Path) -> Any:
    """Compare texts."""
    alike = AutoModel.from_pretrained(demo).similarity("The breakfast was good.", TEXTS)
    return TEXTS[int(alike.argmax())]


# --- other heads -------------------------------------------------------------------------------------


@task
def fill_a_mask(demo: Path) -> Any:
    """Predict masked words; a folder without this head gets a random one."""
    model = AutoModelForMaskedLM.from_pretrained(demo)
    return model.fill_mask("The film was [MASK].", top_k=2, untrained=True)


@task
def choose_among_words(demo: Path) -> Any:
    """Score given words for a mask."""
    model = AutoModelForMaskedLM.from_pretrained(demo)
    return model.fill_mask("The film was [MASK].", targets=["good", "bad"], untrained=True)


@task
def find_entities(demo: Path) -> Any:
    """Train on words and tags, and find entities with positions."""
    rows = [{"words": ["Ada", "lives", "in", "London"], "tags": ["B-PER", "O", "O", "B-LOC"]}] * 8
    tagger: Any = finetune(str(demo), train=rows, epochs=20, batch_size=8, lr=1e-2, progress=False).model
    text = "Ada lives in London"
    found = tagger.predict(text)
    assert all(text[one.start : one.end] == one.word for one in found)
    return found


@task
def answer_a_question(demo: Path) -> Any:
    """Find the answer in a context."""
    model = AutoModelForQuestionAnswering.from_pretrained(demo)
    context = "The staff were kind. The rooms were cold."
    best = model.answer("What was cold?", context, untrained=True)
    assert best.text == context[best.start : best.end]
    return best


@task
def label_without_training(demo: Path) -> Any:
    """Zero-shot: score labels with a natural language inference model."""
    model = AutoModelForSequenceClassification.from_pretrained(demo, labels=["contradiction", "neutral", "entailment"])
    return model.zero_shot(TEXTS[0], candidate_labels=["food", "travel"], untrained=True)


@task
def rank_documents(demo: Path) -> Any:
    """Sort documents with a cross-encoder."""
    model = AutoModelForSequenceClassification.from_pretrained(demo, num_labels=1)
    ranked = model.rerank("Was the food good?", TEXTS, top_k=2, untrained=True)
    assert ranked[0].text in TEXTS
    return ranked


# --- training ----------------------------------------------------------------------------------------


@task
def train_a_classifier(demo: Path) -> Any:
    """Train on rows and write a folder; one fifth is evaluation data."""
    rows = [{"text": text, "label": LABELS[label]} for text, label in sentences()[:60]]
    result = finetune(
        str(demo), train=rows, eval=0.2, out=demo.parent / "tuned", overwrite=True, epochs=1, progress=False
    )
    assert "accuracy" in result.metrics
    return result


@task
def train_with_the_words_of_a_trainer(demo: Path) -> Any:
    """Use the argument names of transformers' TrainingArguments."""
    rows = [{"text": text, "label": LABELS[label]} for text, label in sentences()[:32]]
    words: Any = {"learning_rate": 5e-5, "num_train_epochs": 1, "per_device_train_batch_size": 16, "warmup_ratio": 0.1}
    result = finetune(str(demo), train=rows, progress=False, **words)
    assert result.steps == 2
    return result


@task
def train_by_hand(demo: Path) -> Any:
    """Train the torch module with an optimiser of your own."""
    model = load(demo)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    encoding = model.tokenizer(TEXTS, padding=True, return_tensors="pt")
    loss = model.compute_loss(encoding, [1, 0, 1])
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@task
def freeze_layers(demo: Path) -> Any:
    """Freeze parts by path."""
    model = load(demo).freeze("embeddings", "layers.0-0")
    assert model.num_parameters(only_trainable=True) < model.num_parameters()
    return f"{model.num_parameters(only_trainable=True):,} of {model.num_parameters():,} learn"


# --- inside ------------------------------------------------------------------------------------------


@task
def call_the_model(demo: Path) -> Any:
    """Call the model with tensors and the keywords of transformers."""
    model = load(demo)
    encoding = model.tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return tuple(model(**encoding).logits.shape)


@task
def look_inside(demo: Path) -> Any:
    """Request hidden states and attention weights; pass embeddings instead of ids."""
    model = AutoModel.from_pretrained(demo, attn_implementation="eager")
    with torch.no_grad():
        embeds = model.get_input_embeddings()(torch.tensor([[2, 7, 3]]))
        found = model(inputs_embeds=embeds, output_hidden_states=True, output_attentions=True)
    assert not isinstance(found, tuple)
    return len(found.hidden_states or ()), len(found.attentions or ())


@task
def tokenize(demo: Path) -> Any:
    """Encode and decode text."""
    tokenizer = AutoTokenizer.from_pretrained(demo)
    ids = tokenizer("The breakfast was delicious.")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True).startswith("the breakfast")
    return tokenizer.convert_ids_to_tokens(ids)


@task
def read_a_configuration(demo: Path) -> Any:
    """Read the configuration without the weights."""
    config = AutoConfig.from_pretrained(demo)
    return config.model_type, config.hidden_size, config.id2label


@task
def make_room_for_words(demo: Path) -> Any:
    """Add tokens, and save them with the model."""
    model = load(demo)
    rows = model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(rows + 8)
    again = load(model.save_pretrained(demo.parent / "wider", overwrite=True))
    return again.get_input_embeddings().num_embeddings - rows


@task
def save_and_load(demo: Path) -> Any:
    """Write an unchanged folder byte for byte."""
    model = load(demo)
    folder = model.save_pretrained(demo.parent / "copy", overwrite=True)
    assert (folder / "model.safetensors").read_bytes() == (demo / "model.safetensors").read_bytes()
    return model


@task
def make_a_mistake(demo: Path) -> Any:
    """Errors contain the found value, the expected value and the correction."""
    try:
        load(demo).predict(("a text", "another"))
    except FlodlError as fault:
        return str(fault)
    raise AssertionError("a tuple of two texts is ambiguous")


def main(folder: Path) -> None:
    """Run all tasks."""
    demo = write_demo(folder / "demo-model")
    for number, function in enumerate(TASKS, 1):
        found = function(demo)
        text = repr(found).replace("\n", " ")
        print(f"{number:>2}. {function.__name__.replace('_', ' ')}: {text[:140]}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as space:
            main(Path(space))
