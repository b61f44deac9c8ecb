"""Mixers of positions in a layer: softmax or latent attention, a gated delta net, or Mamba-2. One module for each."""
