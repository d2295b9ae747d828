"""Extensions of Lightning's DDP: options, a reducer that follows `requires_grad`, unreduced gradients refused."""
