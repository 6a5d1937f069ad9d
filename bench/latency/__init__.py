"""How long an event takes from its commit to a consumer, through an idle relay."""
