//! The way into a learner: Burn keeps its model and optimizer to itself, and shows them to the model's `optimize` only.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::train::Learner;

use super::{SpModel, SpStep};

/// What the next `optimize` on this thread does instead of an update.
pub(super) type Edit<M> = Box<dyn FnOnce(SpModel<M>, &mut ModuleOptimizer) -> SpModel<M>>;

thread_local! {
    static NEXT: RefCell<Option<Box<dyn Any>>> = const { RefCell::new(None) };
}

/// Changes what a learner holds, and returns what the change returns beside the model.
pub(super) fn edit<M: SpStep, T: 'static>(
    learner: &mut Learner<SpModel<M>>,
    change: impl FnOnce(SpModel<M>, &mut ModuleOptimizer) -> (SpModel<M>, T) + 'static,
) -> T {
    let result = Rc::new(Cell::new(None));
    let slot = result.clone();
    let edit: Edit<M> = Box::new(move |model, optimizer| {
        let (model, value) = change(model, optimizer);
        slot.set(Some(value));
        model
    });
    NEXT.set(Some(Box::new(edit)));
    learner.optimizer_step(GradientsParams::new());
    result.take().expect("the learner asks its model to optimize")
}

/// What was to be done by [`edit`], for the model's `optimize`.
pub(super) fn pending<M: SpStep>() -> Option<Edit<M>> {
    let edit = NEXT.take()?.downcast::<Edit<M>>();
    Some(*edit.expect("a learner edits a model of its own type"))
}
