"""`tepal predict`: predictions of a saved model or ensemble."""
