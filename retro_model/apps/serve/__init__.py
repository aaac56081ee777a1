"""Model folders, and their uses: `retro-model ask` and the page of `retro-model serve`."""
