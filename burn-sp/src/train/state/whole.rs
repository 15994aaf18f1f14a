use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor};

use super::share::Share;
use crate::SpDevice;
use crate::train::{ParamLayouts, ParamShards};

/// The module with every parameter whole, on rank 0; none on the other ranks. Collective.
///
/// What rank 0 gets is the module as it was before it was sharded over `tp` or
/// [its parameters were shared out](super::super::shard_parameters), with the same names and ids: Burn's own records
/// ([`Module::save_file`]) and files of other formats can be written from it, whatever the mesh, and loaded on any other.
/// `layouts` are those of the module before parameters were shared out, or after, as `shards` knows both; the default of
/// either is for a module that has no such parameters.
///
/// Parameters travel one by one: no device ever holds more than one that is whole beside its own. What rank 0 gets is in
/// host memory, on Burn's CPU backend (on its own device if burn-sp is built without `flex`): a model is shared out because
/// it does not fit a device.
///
/// The other ranks go on. At their next collective they wait for what rank 0 does with the module, for its disk say, no
/// longer than for any other (see [`LaunchConfig`](crate::LaunchConfig)): launch with a longer
/// [`with_timeout`](crate::LaunchConfig::with_timeout), or save after the last step.
///
/// # Panics
/// If another rank does something else meanwhile (in a launched rank: every rank fails with a report).
///
/// # Example
/// ```
/// use burn::module::Module;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Device;
/// use burn_sp::prelude::*;
/// use burn_sp::train::{shard_parameters, whole_module};
///
/// let file = std::env::temp_dir().join(format!("whole-{}.bpk", std::process::id()));
/// let linear = |device: &Device| LinearConfig::new(4, 4).init(device);
/// launch(&LaunchConfig::new(MeshShape::ulysses(2)), &Device::flex(), |device: SpDevice| {
///     let layouts = ParamLayouts::replicated();
///     let (part, shards) = shard_parameters(device.seeded(1, linear), &device, &layouts);
///     assert_eq!(part.num_params(), (16 + 4) / 2);
///     if let Some(whole) = whole_module(&part, &layouts, &shards, &device) {
///         whole.save_file(&file).unwrap();
///     }
/// })?;
/// let loaded: Linear = linear(&Device::flex()).load_file(&file);
/// assert_eq!(loaded.num_params(), 16 + 4);
/// # std::fs::remove_file(&file).unwrap();
/// # Ok::<(), burn_sp::Error>(())
/// ```
#[doc(alias = "gather")]
#[doc(alias = "unshard")]
#[track_caller]
pub fn whole_module<M: Module>(
    module: &M,
    layouts: &ParamLayouts,
    shards: &ParamShards,
    device: &SpDevice,
) -> Option<M> {
    let host = host(device.device());
    let mut gather = Gather {
        layouts,
        shards,
        device,
        host: &host,
    };
    let whole = module.clone().map(&mut gather);
    gather.is_first().then(|| whole.fork(&host))
}

/// Where there is room for a whole module.
fn host(own: &Device) -> Device {
    let host = own.clone();
    #[cfg(feature = "flex")]
    let host = match host.is_autodiff() {
        true => Device::flex().autodiff(),
        false => Device::flex(),
    };
    host
}

struct Gather<'a> {
    layouts: &'a ParamLayouts,
    shards: &'a ParamShards,
    device: &'a SpDevice,
    host: &'a Device,
}

impl Gather<'_> {
    fn is_first(&self) -> bool {
        self.device.rank() == 0
    }
}

impl ModuleMapper for Gather<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let share = Share::of(param.id, self.layouts, self.shards);
        if share.is_whole() {
            return param;
        }
        param.map(|own| {
            let whole = share.gather(own.clone().detach(), self.device);
            match self.is_first() {
                // At once, so that parameters pile up there.
                true => whole
                    .detach()
                    .to_device(self.host)
                    .set_require_grad(own.is_require_grad()),
                false => own,
            }
        })
    }
}
