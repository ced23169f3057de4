"""What a part of a decoder layer is: where its weights are, what it computes, what it costs."""
