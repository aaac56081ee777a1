"""Uses of a trained model: model folders, `retro-model ask` and the page of `retro-model serve`."""
