"""Small models that nc_run takes."""

import warnings

import torch
import transformers

import nc

KINDS = {"static": nc.StaticQuantConfig, "dynamic": nc.DynamicQuantConfig}
SMALL = {
    "vocab_size": 100,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}


def mlp():
    layers = torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32)
    return torch.nn.Sequential(*layers).eval(), torch.rand(16, 64)


class Sentence(torch.nn.Module):
    """An encoder with the pooling of sentence-transformers: means over real tokens, of length 1."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids, attention_mask):
        values = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        real = attention_mask[..., None].float()
        means = (values * real).sum(1) / real.sum(1).clamp(min=1e-9)
        return torch.nn.functional.normalize(means, p=2, dim=1)


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.LSTM(8, 16, batch_first=True, bidirectional=True)
        self.last = torch.nn.Linear(32, 8)

    def forward(self, x):
        return self.last(self.layer(x)[0][:, -1])


def texts(count, length, vocabulary=100):
    """Ids and mask of texts of different lengths, the first of which is as long as the ids."""
    ids = torch.randint(5, vocabulary, (count, length))
    mask = (
        torch.arange(length) < torch.tensor([max(1, length - 3 * i) for i in range(count)])[:, None]
    ).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


MODELS = {
    "mlp": mlp,
    "recurrent": lambda: (Recurrent().eval(), torch.rand(2, 5, 8)),
    "bert": lambda: (transformers.BertModel(transformers.BertConfig(**SMALL)).eval(), texts(3, 24)),
    # the shape of all-MiniLM-L6-v2, but for vocabulary and layers
    "minilm": lambda: (
        Sentence(
            transformers.BertModel(
                transformers.BertConfig(
                    vocab_size=100,
                    hidden_size=384,
                    num_hidden_layers=2,
                    num_attention_heads=12,
                    intermediate_size=1536,
                    max_position_embeddings=512,
                )
            )
        ).eval(),
        texts(3, 24),
    ),
    # its positions are computed from ids
    "roberta": lambda: (
        transformers.RobertaModel(transformers.RobertaConfig(**SMALL, pad_token_id=0)).eval(),
        texts(3, 24),
    ),
    "distilbert": lambda: (
        transformers.DistilBertModel(
            transformers.DistilBertConfig(
                vocab_size=100, dim=48, n_layers=2, n_heads=4, hidden_dim=96, max_position_embeddings=64
            )
        ).eval(),
        texts(3, 24),
    ),
}


def call(model, inputs):
    """Return what a model of torch gives, as a list of tensors."""
    with torch.no_grad():
        found = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return list(found.values()) if isinstance(found, dict) else [found]


def quantized(name, kind, backend="native"):
    """Return the fp32 model, its quantized one, and an example."""
    torch.manual_seed(0)
    model, example = MODELS[name]()
    calibrate = (lambda prepared: call(prepared, example)) if kind == "static" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q_model = nc.quantize(model, KINDS[kind](), calibrate, example_inputs=example, backend=backend)
    return model, q_model, example
