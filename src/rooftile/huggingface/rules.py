"""How the lines that are replaced are written in the modeling files, and what takes their place.

See `rewrite.Rule` for the notation.
"""

from __future__ import annotations

from rooftile.huggingface.rewrite import Rule, Together

ADD_NORM = (
    Rule(
        """
H = R + X
R = H
H = NORM(H)
""",
        "H, R = add_norm(NORM, X, R)",
    ),
)


def gated(activation: str) -> tuple[Rule, ...]:
    act = f"self.{activation}"
    return (
        Rule(
            f"""
GATE, UP = X.chunk(2, dim=-1)
Y = UP * {act}(GATE)
""",
            f"Y = act_mul_packed({act}, X)",
        ),
        Rule(
            f"""
GATE, UP = X.chunk(2, dim=-1)
return {act}(GATE) * UP
""",
            f"return act_mul_packed({act}, X)",
        ),
        Rule(
            f"""
A = {act}(GATE)
B = UP
Y = A * B
""",
            f"Y = act_mul({act}, GATE, UP)",
        ),
        Rule(f"{act}(GATE) * UP", f"act_mul({act}, GATE, UP)"),
    )


def activated(activation: str) -> tuple[Rule, ...]:
    return (
        Rule(
            f"""
H = LINEAR(X)
H = self.{activation}(H)
""",
            f"H = linear_act(LINEAR, X, self.{activation})",
        ),
    )


def rope(function: str) -> tuple[Rule, ...]:
    return (Rule(f"{function}(Q, K, COS, SIN)", f"rope_of_{function}(Q, K, COS, SIN)"),)


def qk_norm_rope(function: str) -> tuple[Rule, ...]:
    """The norms move to where the rotation is: Qwen3 transposes behind them, Gemma 3 before."""
    return (
        Rule(
            f"""
Q = self.q_norm(X).transpose(1, 2)
K = self.k_norm(Y).transpose(1, 2)
...
Q, K = {function}(Q, K, COS, SIN)
""",
            f"""
Q = X
K = Y
...
Q, K = transposed_norm_rope_of_{function}(self.q_norm, self.k_norm, Q, K, COS, SIN)
""",
        ),
        Rule(
            f"""
Q = self.q_norm(X)
K = self.k_norm(Y)
...
Q, K = {function}(Q, K, COS, SIN)
""",
            f"""
Q = X
K = Y
...
Q, K = norm_rope_of_{function}(self.q_norm, self.k_norm, Q, K, COS, SIN)
""",
        ),
    )


def joint_products(layers: tuple[str, ...]) -> tuple[Together, ...]:
    return (Together(layers, "products"),)


def gated_products(activation: str, layers: tuple[str, ...]) -> tuple[Rule, ...]:
    """Of two layers, gate and up, or of one that is both (Phi-3)."""
    act = f"self.{activation}"
    if len(layers) == 1:
        return (
            Rule(
                f"""
H = self.{layers[0]}(X)
GATE, UP = H.chunk(2, dim=-1)
Y = UP * {act}(GATE)
""",
                f"Y = gated_product_packed({act}, self.{layers[0]}, X)",
            ),
        )
    gate, up = (f"self.{layer}" for layer in layers)
    return (
        Rule(
            f"""
A = {act}({gate}(X))
B = {up}(X)
Y = A * B
""",
            f"Y = gated_product({act}, {gate}, {up}, X)",
        ),
        Rule(f"{act}({gate}(X)) * {up}(X)", f"gated_product({act}, {gate}, {up}, X)"),
    )
