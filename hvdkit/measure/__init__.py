"""How fast, how big: scaling, collectives without the model, prediction, memory, a training's numbers."""
