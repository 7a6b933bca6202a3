"""What `sample` says of numbers at the edges of their ranges, and of those beyond, which tensors may hold."""

import torch

from rooftile import sample


def test_edges_of_the_numbers(device):
    """What the docstring says of each, of numbers for all rows and of tensors."""
    logits = torch.randn(3, 50, device=device)
    logits[1, 7:9] = logits.max() + 1  # equals
    drawn = {"temperature": 1.0, "seeds": 3, "positions": 5}

    def each(value, dtype=torch.float32, rows=3):
        return torch.full((rows,), value, device=device, dtype=dtype)

    largest = logits.argmax(-1)
    for options in (
        {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
        {**drawn, "temperature": each(-1.0)},
        {**drawn, "top_k": 1},
        {**drawn, "top_p": 1e-9},
        {**drawn, "top_p": each(0.0)},
        {**drawn, "top_p": each(-1.0)},
    ):
        assert torch.equal(sample(logits, **options)[0], largest), options
    expected = sample(logits, **drawn)[0]
    for options in (
        {"top_k": 50},
        {"top_k": 2**31 - 1},
        {"top_k": each(-2, torch.int64)},
        {"top_p": 1},
        {"top_p": each(1.5)},
        {"min_p": 0},
        {"min_p": each(-0.5)},
        {"repetition_penalty": 1},
    ):
        assert torch.equal(sample(logits, **drawn, **options)[0], expected), options
    numbers = torch.arange(8, device=device)
    for min_p in (1.0, each(1.0, rows=8), each(2.0, rows=8)):
        tokens, _ = sample(logits[1].repeat(8, 1), **{**drawn, "seeds": numbers}, min_p=min_p)
        assert set(tokens.tolist()) == {7, 8}
    assert torch.equal(sample(logits)[0], largest)
    assert len(set(sample(logits[0].repeat(8, 1), **{**drawn, "positions": numbers})[0].tolist())) > 1
