"""From text to tokens: a store of parts, each made once by whoever comes to it. No torch."""
