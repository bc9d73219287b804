"""Folders to serve."""

import pytest
import torch
from suites.real_minilm import minilm

import nc


class Words(torch.nn.Module):
    """Two inputs with rows; rows of zeros in the mask count nothing."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = torch.nn.Embedding(50, 32), torch.nn.Linear(32, 8)

    def forward(self, ids, weights):
        return {"scores": self.linear((self.table(ids) * weights[..., None]).sum(1))}


def quantized_words(seed):
    torch.manual_seed(seed)
    x = {"ids": torch.randint(0, 50, (4, 6)), "weights": torch.rand(4, 6)}
    return nc.quantize(
        Words().eval(), nc.StaticQuantConfig(), lambda m: m(**x), example_inputs=x, measure=False
    )


@pytest.fixture(scope="session")
def other_words():
    """A model with other weights."""
    return quantized_words(1)


@pytest.fixture(scope="session")
def words(tmp_path_factory):
    """(Folder of an artefact, the model)."""
    q = quantized_words(0)
    folder = tmp_path_factory.mktemp("serve") / "words"
    nc.save(q, folder)
    return folder, q


@pytest.fixture(scope="session")
def sentences(tmp_path_factory):
    """(Folder of quantized MiniLM, the model)."""
    st = pytest.importorskip("sentence_transformers")
    import nc.hf

    model = st.SentenceTransformer(str(minilm.model_folder()), device="cpu")
    folder = tmp_path_factory.mktemp("serve") / "minilm"
    texts = [text for text in minilm.split()[0] if len(text) < 200][:32]
    return folder, nc.hf.quantize_sentence_transformer(
        model, texts, folder, nc.StaticQuantConfig(), measure=False
    )
