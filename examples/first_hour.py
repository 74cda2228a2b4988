"""Thirty things that people do in their first hour, each in a few lines.

    python examples/first_hour.py [FOLDER]

Everything runs offline on a small model that is trained on this machine first; a folder or a name of the Hub stands in
its place in real life. Heads that the small model does not have are trained for a few steps: their answers are real,
only not good. Files go to FOLDER, or to a temporary one.
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
    """Add a task; its docstring says what is done, and it returns what is worth looking at."""
    TASKS.append(function)
    return function


# --- answers -----------------------------------------------------------------------------------------


@task
def classify_a_text(demo: Path) -> Any:
    """Load a model and ask it about one text."""
    model: Any = load(demo)
    found = model.predict("I love it.")
    assert found.label == "praise"
    return found


@task
def classify_many_texts(demo: Path) -> Any:
    """A list gives a list, in its order."""
    found = load(demo).predict(TEXTS)
    assert [one.label for one in found] == ["praise", "complaint", "praise"]
    return found


@task
def keep_the_sure_ones(demo: Path) -> Any:
    """Labels above a threshold, at most so many."""
    model: Any = load(demo)
    assert all(len(one) <= 1 for one in model.predict(TEXTS, top_k=1, threshold=0.9))
    return model.predict(TEXTS, threshold={"praise": 0.99})


@task
def classify_pairs(demo: Path) -> Any:
    """Two texts that belong together are a pair in a list."""
    return load(demo).predict([("Was it good?", "I love it.")])


@task
def read_a_long_text(demo: Path) -> Any:
    """Nothing is cut: a text longer than the model takes is read in windows."""
    found = load(demo).predict("The breakfast was delicious. " * 100)
    assert found.windows > 1
    return found


@task
def answer_a_stream(demo: Path) -> Any:
    """An iterator gives an iterator: any number of texts in constant memory."""
    return next(load(demo).predict(text for text in TEXTS))


@task
def meet_an_empty_text(demo: Path) -> Any:
    """A text with nothing in it has no label, and says why."""
    found = load(demo).predict(["I love it.", "  "])
    assert found.empty == [1]
    return found


@task
def results_as_json(demo: Path) -> Any:
    """Results become dictionaries, JSON, or rows for a table."""
    found = load(demo).predict(TEXTS)
    json.dumps(found.to_dict())
    return found.to_rows()[0]


@task
def a_pipeline_as_before(demo: Path) -> Any:
    """Code for transformers' pipelines goes on as it is."""
    classify = pipeline("sentiment-analysis", model=str(demo))
    (found,) = classify("I love it.")
    assert found["label"] == "praise"
    return classify(TEXTS, top_k=1)


@task
def a_file_of_texts(demo: Path) -> Any:
    """A file in, a file out; the same call goes on where it was ended."""
    source, out = demo.parent / "texts.csv", demo.parent / "answers.csv"
    source.write_text("id,text\n" + "".join(f"{n},{text}\n" for n, text in enumerate(TEXTS)), encoding="utf-8")
    result = predict_file(demo, source, out, restart=True)
    assert result.written == len(TEXTS)
    return out.read_text(encoding="utf-8").splitlines()[1]


# --- vectors -----------------------------------------------------------------------------------------


@task
def embed_texts(demo: Path) -> Any:
    """A vector for each text."""
    vectors = AutoModel.from_pretrained(demo).embed(TEXTS)
    assert isinstance(vectors, torch.Tensor)
    return tuple(vectors.shape)


@task
def vectors_as_sentence_transformers(demo: Path) -> Any:
    """The same words, and an array."""
    return AutoModel.from_pretrained(demo).encode(TEXTS, normalize_embeddings=True).shape


@task
def find_the_closest_text(demo: Path) -> Any:
    """How alike texts are."""
    alike = AutoModel.from_pretrained(demo).similarity("The breakfast was good.", TEXTS)
    return TEXTS[int(alike.argmax())]


# --- other heads -------------------------------------------------------------------------------------


@task
def fill_a_mask(demo: Path) -> Any:
    """The words behind a mask; a folder without the head gets a fresh one, which says so."""
    model = AutoModelForMaskedLM.from_pretrained(demo)
    return model.fill_mask("The film was [MASK].", top_k=2, untrained=True)


@task
def choose_among_words(demo: Path) -> Any:
    """Only some words are of interest."""
    model = AutoModelForMaskedLM.from_pretrained(demo)
    return model.fill_mask("The film was [MASK].", targets=["good", "bad"], untrained=True)


@task
def find_entities(demo: Path) -> Any:
    """Train a tagger on words and tags, and find entities where they stand."""
    rows = [{"words": ["Ada", "lives", "in", "London"], "tags": ["B-PER", "O", "O", "B-LOC"]}] * 8
    tagger: Any = finetune(str(demo), train=rows, epochs=20, batch_size=8, lr=1e-2, progress=False).model
    text = "Ada lives in London"
    found = tagger.predict(text)
    assert all(text[one.start : one.end] == one.word for one in found)
    return found


@task
def answer_a_question(demo: Path) -> Any:
    """The span of a context that answers."""
    model = AutoModelForQuestionAnswering.from_pretrained(demo)
    context = "The staff were kind. The rooms were cold."
    best = model.answer("What was cold?", context, untrained=True)
    assert best.text == context[best.start : best.end]
    return best


@task
def label_without_training(demo: Path) -> Any:
    """Zero-shot: a model of natural language inference judges labels that it never saw."""
    model = AutoModelForSequenceClassification.from_pretrained(demo, labels=["contradiction", "neutral", "entailment"])
    return model.zero_shot(TEXTS[0], candidate_labels=["food", "travel"], untrained=True)


@task
def rank_documents(demo: Path) -> Any:
    """A cross-encoder of one label orders documents by a query."""
    model = AutoModelForSequenceClassification.from_pretrained(demo, num_labels=1)
    ranked = model.rerank("Was the food good?", TEXTS, top_k=2, untrained=True)
    assert ranked[0].text in TEXTS
    return ranked


# --- training ----------------------------------------------------------------------------------------


@task
def train_a_classifier(demo: Path) -> Any:
    """Rows in, a trained folder out; a fifth is held out to judge by."""
    rows = [{"text": text, "label": LABELS[label]} for text, label in sentences()[:60]]
    result = finetune(
        str(demo), train=rows, eval=0.2, out=demo.parent / "tuned", overwrite=True, epochs=1, progress=False
    )
    assert "accuracy" in result.metrics
    return result


@task
def train_with_the_words_of_a_trainer(demo: Path) -> Any:
    """Words of transformers' TrainingArguments mean what they mean there."""
    rows = [{"text": text, "label": LABELS[label]} for text, label in sentences()[:32]]
    words: Any = {"learning_rate": 5e-5, "num_train_epochs": 1, "per_device_train_batch_size": 16, "warmup_ratio": 0.1}
    result = finetune(str(demo), train=rows, progress=False, **words)
    assert result.steps == 2
    return result


@task
def train_by_hand(demo: Path) -> Any:
    """A model is a torch module: an optimiser, a loss, a step."""
    model = load(demo)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    encoding = model.tokenizer(TEXTS, padding=True, return_tensors="pt")
    loss = model.compute_loss(encoding, [1, 0, 1])
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@task
def freeze_layers(demo: Path) -> Any:
    """Parts that do not learn are named by their path."""
    model = load(demo).freeze("embeddings", "layers.0-0")
    assert model.num_parameters(only_trainable=True) < model.num_parameters()
    return f"{model.num_parameters(only_trainable=True):,} of {model.num_parameters():,} learn"


# --- inside ------------------------------------------------------------------------------------------


@task
def call_the_model(demo: Path) -> Any:
    """Tensors in, logits out, with transformers' keywords."""
    model = load(demo)
    encoding = model.tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        return tuple(model(**encoding).logits.shape)


@task
def look_inside(demo: Path) -> Any:
    """Hidden states, attention weights, embeddings in place of ids."""
    model = AutoModel.from_pretrained(demo, attn_implementation="eager")
    with torch.no_grad():
        embeds = model.get_input_embeddings()(torch.tensor([[2, 7, 3]]))
        found = model(inputs_embeds=embeds, output_hidden_states=True, output_attentions=True)
    assert not isinstance(found, tuple)
    return len(found.hidden_states or ()), len(found.attentions or ())


@task
def tokenize(demo: Path) -> Any:
    """Text to ids and back."""
    tokenizer = AutoTokenizer.from_pretrained(demo)
    ids = tokenizer("The breakfast was delicious.")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True).startswith("the breakfast")
    return tokenizer.convert_ids_to_tokens(ids)


@task
def read_a_configuration(demo: Path) -> Any:
    """What the folder says, without its weights."""
    config = AutoConfig.from_pretrained(demo)
    return config.model_type, config.hidden_size, config.id2label


@task
def make_room_for_words(demo: Path) -> Any:
    """More rows in the table of words, saved with the model."""
    model = load(demo)
    rows = model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(rows + 8)
    again = load(model.save_pretrained(demo.parent / "wider", overwrite=True))
    return again.get_input_embeddings().num_embeddings - rows


@task
def save_and_load(demo: Path) -> Any:
    """A folder that was not changed is written back byte for byte."""
    model = load(demo)
    folder = model.save_pretrained(demo.parent / "copy", overwrite=True)
    assert (folder / "model.safetensors").read_bytes() == (demo / "model.safetensors").read_bytes()
    return model


@task
def make_a_mistake(demo: Path) -> Any:
    """Errors say what was found, what was expected, and what to do."""
    try:
        load(demo).predict(("a text", "another"))
    except FlodlError as fault:
        return str(fault)
    raise AssertionError("a tuple of two texts is ambiguous")


def main(folder: Path) -> None:
    """Do all of it."""
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
