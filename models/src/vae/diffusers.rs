use serde::Deserialize;

use super::{ImportError, VaeConfig};

/// The fields of diffusers' `AutoencoderKLWan` that a model depends on; those that are left out are Wan 2.1's.
#[derive(Deserialize)]
#[serde(default)]
struct Fields {
    base_dim: usize,
    decoder_base_dim: Option<usize>,
    z_dim: usize,
    dim_mult: Vec<usize>,
    num_res_blocks: usize,
    attn_scales: Vec<f64>,
    temperal_downsample: Vec<bool>,
    latents_mean: Vec<f64>,
    latents_std: Vec<f64>,
    is_residual: bool,
    in_channels: usize,
    out_channels: usize,
    patch_size: Option<usize>,
}

impl Default for Fields {
    fn default() -> Self {
        let wan = VaeConfig::wan21();
        Self {
            base_dim: wan.base_channels,
            decoder_base_dim: None,
            z_dim: wan.latent_channels,
            dim_mult: wan.multipliers,
            num_res_blocks: wan.res_blocks,
            attn_scales: Vec::new(),
            temperal_downsample: wan.temporal,
            latents_mean: wan.latent_mean,
            latents_std: wan.latent_std,
            is_residual: wan.shortcuts,
            in_channels: wan.pixel_channels,
            out_channels: wan.pixel_channels,
            patch_size: None,
        }
    }
}

impl VaeConfig {
    /// From the `config.json` of a checkpoint of diffusers' `AutoencoderKLWan`.
    ///
    /// # Errors
    /// If it is no such configuration, or of a model that cannot be.
    pub fn from_diffusers(json: &str) -> Result<Self, ImportError> {
        let wrong = |what: String| Err(ImportError::Config(what));
        let fields: Fields = match serde_json::from_str(json) {
            Ok(fields) => fields,
            Err(error) => return wrong(error.to_string()),
        };
        if !fields.attn_scales.is_empty() {
            return wrong("it has attention in its stages (attn_scales), which Wan's have not".into());
        }
        let patch = fields.patch_size.unwrap_or(1).max(1);
        if fields.in_channels != fields.out_channels || !fields.in_channels.is_multiple_of(patch * patch) {
            return wrong(format!(
                "in_channels {} and out_channels {}; both are the pixel's channels times {patch} x {patch}",
                fields.in_channels, fields.out_channels
            ));
        }
        let config = Self {
            base_channels: fields.base_dim,
            decoder_channels: fields.decoder_base_dim.unwrap_or(fields.base_dim),
            latent_channels: fields.z_dim,
            multipliers: fields.dim_mult,
            res_blocks: fields.num_res_blocks,
            temporal: fields.temperal_downsample,
            shortcuts: fields.is_residual,
            patch_size: patch,
            latent_mean: fields.latents_mean,
            latent_std: fields.latents_std,
            pixel_channels: fields.in_channels / (patch * patch),
        };
        match config.problem() {
            Some(problem) => wrong(problem),
            None => Ok(config),
        }
    }
}
