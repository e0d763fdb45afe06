"""Movement scores on plain lists."""


def scores(history: list[tuple[list[float], list[float]]]) -> list[float]:
    """−Σ g w of each weight; ``history`` holds gradients and weights of each step."""
    return [
        -sum(gradients[i] * weights[i] for gradients, weights in history)
        for i in range(len(history[0][0]))
    ]
