"""A model and a data set of one's own, trained by `dprc fit`."""
