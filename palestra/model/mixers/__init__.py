"""What mixes positions in a layer: softmax attention, or a gated delta net. One module for each."""
