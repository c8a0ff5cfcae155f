"""Strategies in the trainers of other projects, one module per trainer; the library never imports these modules."""
